"""An operand gathered along a mesh axis, and a product."""
