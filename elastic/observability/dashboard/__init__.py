"""The dashboard: a page that shows a job, or a fleet, live, and lets an operator act on it.

thinned_series.py  values over steps or time in a bounded number of points. Pure
job_history.py     a job's journals and ledger become the page's document and its events
access.py          who may see the page and act: key, cookie, Host, Origin, CSRF token. Pure
sources.py         what a source of a job or a fleet has to offer, and the actions; the next two have it
directory_source.py  a job of this machine
fleet_source.py    the jobs of a fleet, through its replicas
feeds.py           polls the sources, and wakes the pages that wait
app.py             the pages and their data over HTTP, with server-sent events
connections.py     how many connections there may be, and how long one may wait with its request
saved_page.py      the page of a job that is over, as one file
pages.py           the page of a job or of a fleet: its source, its feed and its server
server.py          the process: address, port, signals
__main__.py        the same beside `elastic run --dashboard`
static/            the page itself; static/vendor/ is uPlot, with its licence and checksums

The dashboard is a process of its own, which reads journals, ledgers and status, and asks the leader of a job for
actions. Training never waits for it, and its end ends nothing else.
"""
