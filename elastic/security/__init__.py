"""Who may come in: certificates, the roles in them, what each role may ask, and as which user jobs run.

roles.py                  the roles, and which of them may call what. Pure
certificate_authority.py  a small authority: what `elastic certs init` and `certs node` do
keyring.py                the certificates of a process, read again when their files change
channels.py               how a process reaches a replica, and how a replica listens, with certificates or without
secure_server.py          everything that a replica needs where callers come in
interceptor.py            every call passes here: role, name, number, pace, size
rate_limit.py             how much each caller may take at once
rejection_log.py          who was turned away and why, however many come; also before a call is made
expiry.py                 certificates that are about to end
job_user.py               another user than the daemon's, as whom jobs run
"""
