import java.io.BufferedReader;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import org.xerial.snappy.SnappyFramedInputStream;

/** Decodes files in the snappy framing format, checksums verified: one `source TAB target` a line of stdin. */
public final class SnappyRead {
    public static void main(String[] args) throws Exception {
        BufferedReader pairs = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
        byte[] piece = new byte[1 << 16];
        for (String line; (line = pairs.readLine()) != null; ) {
            String[] pair = line.split("\t");
            try (InputStream in = new SnappyFramedInputStream(new FileInputStream(pair[0]), true);
                    OutputStream out = new FileOutputStream(pair[1])) {
                for (int n; (n = in.read(piece)) >= 0; ) {
                    out.write(piece, 0, n);
                }
            } catch (Exception e) {
                System.err.println(pair[0] + ": " + e);
                System.exit(1);
            }
        }
    }
}
