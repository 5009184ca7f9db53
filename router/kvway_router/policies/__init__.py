"""Ways to choose a replica, all behind one interface: ours and those we compare it with."""
