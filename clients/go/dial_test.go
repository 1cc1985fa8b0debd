package slotwise

import "testing"

func TestTokenStaysOnThisMachine(t *testing.T) {
	for address, isSafe := range map[string]bool{
		"127.0.0.1:50051":        true,
		"localhost:50051":        true,
		"[::1]:50051":            true,
		"unix:/run/slotwise":     true,
		"dns:///127.0.0.1:50051": true,
		"10.0.0.1:50051":         false,
		"localhost.example:1":    false,
		"example.com:50051":      false,
	} {
		client, err := Dial(address, WithToken("secret"))
		if (err == nil) != isSafe {
			t.Errorf("%s: %v", address, err)
		}
		if err == nil {
			client.Close()
		}
	}
	for _, option := range []DialOption{WithTLS(nil), WithInsecureToken()} {
		client, err := Dial("example.com:50051", WithToken("secret"), option)
		if err != nil {
			t.Fatal(err)
		}
		client.Close()
	}
}

func TestTokenThatCannotBeSent(t *testing.T) {
	for _, token := range []string{"", "two words", "sécret", "line\n"} {
		if _, err := Dial("127.0.0.1:1", WithToken(token)); err == nil {
			t.Errorf("%q was taken", token)
		}
	}
}
