"""SGLang: the client of a server, its replies, fingerprints of weights, and our plugin inside of it."""
