"""`python -m elastic.agent`."""

import sys

from elastic.agent.agent import main

sys.exit(main())
