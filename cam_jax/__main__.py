"""`python -m cam_jax` is `cam-jax`."""

import sys

from cam_jax.cli.main import main

sys.exit(main())
