"""`python -m elastic.agent.handover MODULE:FUNCTION`: the new program is tried."""

import sys

from elastic.agent.handover.trial_run import main

sys.exit(main())
