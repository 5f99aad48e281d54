"""The statistics of a report: intervals, resampling, power, multiple tests."""
