"""HTTP/1.1 on the wire: clients, engines, and the bytes between them. All I/O of the data plane is here."""
