"""The C++ kernels: the same pass as the compiled loops of `models`, to the last bit, built on the user's machine."""
