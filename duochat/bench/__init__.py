"""Measuring: tasks, contestants, report, and the schedules on a virtual clock."""
