"""What kernels are compiled to, and the rules that their PTX keeps."""
