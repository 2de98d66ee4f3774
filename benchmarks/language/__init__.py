"""What interleaving is worth: many answers at once against one after another, on the bundled worker."""
