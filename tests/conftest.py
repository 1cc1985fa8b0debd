"""What holds for every test."""

from hypothesis import settings

# Its limit for one example is of the clock, which a busy machine passes.
settings.register_profile("slotwise", deadline=None)
settings.load_profile("slotwise")
