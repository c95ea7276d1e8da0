"""The connections of a rank with others, and what is said over them, without knowing what it is for.

Each file imports only those before it: tree (who is connected with whom), runs (ranks as few numbers), frames
(messages as bytes), link (one connection), proof and strangers (who may connect), leaving (how connections end),
address (where to listen), join (how ranks find each other in the store), halting (where all stop), gathering and centre
(what is counted, kept and passed on), heartbeat, node (all connections, and the thread that serves them).
"""
