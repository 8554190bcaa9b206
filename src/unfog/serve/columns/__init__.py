"""Numbers of runs for the charts: read as the record grows, thinned for the screen, and sent as binary columns."""
