"""Admission control: who may connect, how much a client may send, and how much may be in memory. Pure.

    request, handshake --auth--> principal --limits--> slot --budget--> bytes read --limits--> message admitted
                        |                    |               |                      |
                     401, 4001           HTTP 429      socket paused        nack `rate_limited`

The folder decides; `http` and `websocket` act on the decisions. Time comes in as `now`, randomness as a function.
`service` builds one set of limits that both listeners share.
"""
