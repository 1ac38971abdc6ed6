"""Access: certificates, the roles in them, the questions that each role may ask, and the user as whom jobs run.

roles.py                  the roles, and which of them may call what. Pure
certificate_authority.py  a small authority, for `elastic certs init` and `certs node`
keyring.py                the certificates of a process, read again when their files change
channels.py               how a process reaches a replica, and how a replica listens, with certificates or without
secure_server.py          the server of a replica, with all of its checks of callers
interceptor.py            the check of every call: role, name, number, rate, size
rate_limit.py             how many calls and messages each caller may send
rejection_log.py          the journal of refused callers, also of failed handshakes
expiry.py                 certificates that are about to end
job_user.py               running jobs as another user than the daemon's
"""
