"""The statistics of a report: intervals, resampling, variance components, power, multiple tests."""
