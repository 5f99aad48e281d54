"""What the scores can bear: intervals, resampling, variance components, power, several tests at once."""
