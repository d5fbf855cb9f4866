"""`python -m phloem.cli`: the same program as `phloem`."""

import sys

from phloem.cli.main import main

sys.exit(main())
