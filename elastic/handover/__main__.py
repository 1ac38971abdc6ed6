"""`python -m elastic.handover MODULE:FUNCTION`: the new program is tried; older versions call it so, too."""

import sys

from elastic.handover.trial import main

sys.exit(main())
