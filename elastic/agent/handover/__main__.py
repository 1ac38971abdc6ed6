"""`python -m elastic.agent.handover MODULE:FUNCTION`: the trial of the new program."""

import sys

from elastic.agent.handover.trial_run import main

sys.exit(main())
