"""``python -m flash_attn_cute.profile ncu``, under its name in the repository."""

import sys

from flash_attn_cute.profile.ncu import main

if __name__ == "__main__":
    sys.exit(main())
