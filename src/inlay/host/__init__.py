"""What is set into a host: hooks, inlays, setups and what is done with them."""
