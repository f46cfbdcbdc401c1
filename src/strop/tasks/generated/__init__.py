"""Problems that are made rather than read: they need no data, and there are as many as are asked for."""
