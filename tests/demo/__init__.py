"""`make demo`: the real daemon at work against an embedded broker, on an empty machine, in under a minute."""
