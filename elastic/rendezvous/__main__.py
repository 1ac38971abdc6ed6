"""`python -m elastic.rendezvous`."""

import sys

from elastic.rendezvous.server import main

sys.exit(main())
