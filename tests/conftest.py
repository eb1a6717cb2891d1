"""What all tests share: the embedded broker is that of `tallystick.testing.pytest_plugin`.

It is not imported here: pytest finds it through the package's entry point, as it does for users.
"""
