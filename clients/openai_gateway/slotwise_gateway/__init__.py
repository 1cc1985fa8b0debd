"""The OpenAI API over HTTP, for a Slotwise server; `slotwise gateway` starts it."""
