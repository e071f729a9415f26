"""Admission: quota, degradation and predicted wait; queue a request or refuse it."""
