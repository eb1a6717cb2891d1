"""The page for operators: what a pipeline does, what is stuck, and what to type.

Source: `tallystick ui`, and `Pipeline.start(ui_port=...)`. Needs the extra `tallystick[ui]`.
"""
