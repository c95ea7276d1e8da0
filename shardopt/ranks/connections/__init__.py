"""The connections of a rank with others, and their messages, regardless of what these are for.

Each file imports only those before it: tree (who is connected with whom), frames (messages as bytes), link (one
connection), proof and unauthenticated (who may connect), meeting (how ranks get to each other), address (where to
listen), join (how ranks find each other in the store), session and message_hub (what is counted, kept and forwarded),
heartbeat, peers (all connections), node (the thread that serves them).
"""
