"""The web page of `unfog serve`: server, guard, data for its charts, and the buttons. The server imports no torch."""
