"""Who may come in: certificates, the roles in them, and what each role may ask.

roles.py       P   the roles, and which of them may call what
authority.py       a small CA: what `elastic certs init` and `certs node` do
keyring.py         the certificates of a process, read again when their files change
channels.py        how a process reaches a replica, and how a replica listens, with certificates or without
guard.py           every call to a replica of a fleet, and to an agent, passes here: role, name, number, pace, size
callers.py         how much each caller may take at once
handshakes.py      what gRPC says of callers that never got as far as a call
refusals.py        who was turned away and why, as lines of the journal, however many come
expiry.py          certificates that are about to end
"""
