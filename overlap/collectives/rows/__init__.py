"""Expert parallelism: tokens are routed to experts, and each device of a mesh axis owns some of the experts."""
