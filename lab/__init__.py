"""Two simulated DGX Sparks on one Linux machine: builds, boots, resets and removes them."""
