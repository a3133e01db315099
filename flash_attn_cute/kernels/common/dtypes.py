"""The dtypes of users' tensors, by the names that configurations have for them."""

import cutlass

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
