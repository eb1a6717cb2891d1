"""The page for operators: the work of a pipeline, what is stuck, and commands to type.

Source: `tallystick ui`, and `Pipeline.start(ui_port=...)`. Needs the extra `tallystick[ui]`.
"""
