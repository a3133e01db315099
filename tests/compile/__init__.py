"""Code of kernels, and the rules that their PTX keeps."""
