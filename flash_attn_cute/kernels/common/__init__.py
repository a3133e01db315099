"""Parts of kernels that do not depend on the architecture."""
