"""Rollouts of a version by steps of its part of the traffic, judged against a concurrent part of the champion."""
