"""Measurements that a reader can repeat. Figures come from the machine that runs them."""
