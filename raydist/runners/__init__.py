"""Who starts the workers: this process or torchrun (`local`), or a Ray cluster (`ray_train`)."""
