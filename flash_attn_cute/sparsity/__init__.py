"""Which blocks of queries and keys see each other, and the orders in which kernels take them."""
