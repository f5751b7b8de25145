"""From generated text to a shared library on disk: find nvcc, compile, keep by content.

``toolchain`` finds and checks the compiler, ``nvcc`` runs it and reads ptxas, ``store`` keeps
what it made, ``builder`` builds many at once. Loading a built kernel needs ``store`` alone.
"""
