"""`make faults`: what must hold while engines, ports, packets, clocks and names go wrong, on real engines."""
