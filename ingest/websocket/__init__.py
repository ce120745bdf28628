"""The WebSocket listener: /ws, from the handshake to acks and receipts.

    socket      reads no more than the memory budget allows
    handshake   accepts or rejects a client, and admits its messages (admission control)
    server      two tasks per connection: the reader queues replies-to-be, the sender awaits them in that order
    client      one connection: its session, its limits, its batches in flight, its receipts
    replies     the messages that are sent back

    socket --frame--> server --message--> handshake: admitted? --> session --> intake
                         `--- replies <--- client <--- verdict ------------------'

`http` imports this folder for /status; it imports `intake` and the layers below.
"""
