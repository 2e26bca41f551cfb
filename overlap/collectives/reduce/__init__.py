"""A product summed over the devices of a mesh axis."""
