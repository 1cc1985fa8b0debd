"""The `slotwise` command: serve, generate, chat, demo, bench, doctor."""
