"""Both ends of EC transfer: arena, reservations, pushes, control listener, Mooncake."""
