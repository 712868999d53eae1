"""What a model would take on a TPU pod: compiled for it on any machine, and read off the program.

- `chips`, `topology`, `presets`: what is planned for, and what
- `layout`: the mesh
- `compile`: the real prefill and decode programs
- `hlo`, `loops`, `matmul`, `traffic`, `collectives`, `costs`: what those programs do
- `roofline`: the least time that takes
- `report`, `table`: policies side by side
"""
