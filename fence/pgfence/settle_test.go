package pgfence_test

func playSettler(string) {}
