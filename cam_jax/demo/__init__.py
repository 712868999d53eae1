"""The demo: a trained MoE model reads real text under several capacity ceilings."""
